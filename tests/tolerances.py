"""All tolerances of the tests, in one place. Changing one needs a reason in the same commit.

Outputs are compared by the largest absolute difference, relative to the largest absolute value of the
reference. Sharding changes the order in which partial sums are added and nothing else, so in fp32 the
difference is rounding: measured 2e-7 to 2e-6.
"""

FP32 = 1e-5
"""A forward, or a gradient, in fp32."""

FP64 = 1e-12
"""A forward in fp64, where rounding cannot hide a mistake."""

LOSSES = 1e-4
"""A loss of a fine-tuning in fp32, relative to that of one process at the same step."""

BF16_RATIO = 1.5
"""A sharded bf16 forward may be this many times as far from fp32 as the one-process bf16 forward is."""

HALF_STEPS = 1.0
"""An element of a norm in half precision, in steps of its dtype: another order of summing may round it to the next."""

MISTAKE = 1e-3
"""A wrong plan must be at least this far off: a hundred times the fp32 tolerance."""

PIXEL = 1
"""Pictures in fp32, in steps of 255."""

ACCURACY = 0.95
"""Share of sampled captions that the embedded model draws right; measured 40 of 40, and 397 of 400."""

QUANTIZED_RATIO = 1.2
"""A quantized sharded model may be this many times as far from fp32 as one process is that quantizes.

By the norm of the difference, averaged over six inputs. Measured 0.85 to 1.08.
"""
