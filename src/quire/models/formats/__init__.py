"""Published formats of quantized weights, each a reader: which tensors hold a weight, and what they mean.

`choose.of_numbers` presents a checkpoint in any of them as one with plain weights.
"""
