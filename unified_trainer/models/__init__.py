"""Model families: one folder or file each, behind the protocols in base.py."""
