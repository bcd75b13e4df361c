"""Getting parameters from files onto devices, and back.

Names in `names.py`, the safetensors format in `files.py`, folders of it in `safetensors.py`, what a
module needs against what a folder has in `match.py`, converted checkpoints in `orbax.py`, hub ids
in `hub.py`, the embedded default in `demo.py`; `load.py` is the front door. No model code here.
"""
