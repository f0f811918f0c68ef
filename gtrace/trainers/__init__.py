"""Capture and codecs as callbacks of other people's trainers, a module for each, which imports that framework::

from gtrace.trainers.lightning import LightningCallback
callback = LightningCallback("run.zarr", codec="qsgdinf:bits=4")
lightning.pytorch.Trainer(callbacks=[callback]).fit(model, data)

from gtrace.trainers.transformers import TransformersCallback
callback = TransformersCallback("run.zarr", codec="qsgdinf:bits=4")
transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
"""
