"""The stages that train the demo model, each a function over modules and data; `train_demo_model.py` runs them."""
