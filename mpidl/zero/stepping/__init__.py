"""The step: of the inner optimizer on slices, on whole parameters, within the backward pass; masters in fp32."""
