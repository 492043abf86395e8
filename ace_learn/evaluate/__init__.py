"""Replay of exit rules on stored traces: calibration with certificates, baselines, comparisons and reports.

`calibrate.run_calibration` is the calibrate stage, `loading.evaluate_policy` the comparison on held-out problems and
`report.write_report` its report; `baselines.BASELINES` lists what a learned policy is compared with.
"""
