"""A plan as an HTML page: its tree, pictures of its timeline, memory and mesh, and what a run measured.

The templates are jinja2's, in ``templates/``; each picture is computed by one module and drawn by one template.
"""
