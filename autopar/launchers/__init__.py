"""Job files for clusters: SLURM's batch scripts and Kubernetes' manifests, from templates in ``templates/``."""
