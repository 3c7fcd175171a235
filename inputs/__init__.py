"""How a batch arrives: data sets, folders of photographs, augmentation, text. Imports no script and no model."""
