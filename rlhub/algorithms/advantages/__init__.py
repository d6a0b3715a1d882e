"""Advantage estimators: `estimator(inputs: AdvantageInputs, knobs) -> AdvantageOutputs`, one file each."""
