"""All tolerances of the tests, in one place. Changing one needs a reason in the same commit.

Outputs are compared by the largest absolute difference, relative to the largest absolute value of the
reference. Sharding changes the order in which partial sums are added and nothing else, so in fp32 the
difference is rounding: measured 2e-7 to 2e-6.
"""

FP32 = 1e-5
"""A forward in fp32, or a gradient of an adapter or of checkpointed blocks."""

ROUNDINGS = 4.0
"""Gradients in fp32 may be this many times as far from those of one process as rounding takes those.

That is measured in one process, whose parameters are moved by one unit in their last place (`tests.gradients.moved`).
Both are the sum of as many small steps, of random sign; by four times one is not beyond the other by chance.
"""

FP64 = 1e-12
"""A forward in fp64, where rounding cannot hide a mistake."""

LOSSES = 1e-4
"""A loss of a fine-tuning in fp32, relative to that of one process at the same step."""

BF16_RATIO = 1.5
"""A sharded bf16 forward may be this many times as far from fp32 as the one-process bf16 forward is.

By the norm of the difference: of the largest one, the ratio is a matter of chance, and of the processor.
"""

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

By the norm of the difference, averaged over inputs. A rank's weights have scales of their own, for no more inputs than
one process has, so the distance to expect is at most that of one process; what a given model has of it is chance.
"""

STANDARD_ERRORS = 3.0
"""By so many standard errors a mean may be beyond what it is held to, where each term of it is a draw.

Of 18 terms, by Student's distribution, a model whose mean is *at* the bound is beyond it once in 248 times; the mean to
expect is a sixth below.
"""
