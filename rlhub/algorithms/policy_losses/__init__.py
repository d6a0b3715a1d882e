"""Policy losses: `loss(inputs: PolicyLossInputs, knobs) -> PolicyLossOutputs` per token, one file each."""
