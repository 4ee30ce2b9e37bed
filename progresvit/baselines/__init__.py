"""Other methods that adapt a ViT's compute, as RoundModels: same backbone, same loop, same counter of MACs.

One file per method. A plain ViT is a ProgResViT with one round and without PSG: :func:`progresvit.config.plain_vit`.
"""
