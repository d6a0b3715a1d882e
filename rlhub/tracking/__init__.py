"""The run folder, the metrics, the report and the trackers of a run; README.md lists the trackers and the metrics.

tracker.py         the interface Tracker
recorder.py        the names of the trackers, and Recorder, which writes what a training loop reports and passes it on to them
metrics_log.py     metrics.jsonl, and the trackers console and tensorboard
mlflow.py, swanlab.py, trackio.py, wandb.py    the trackers of these names
run_folder.py      the run's folder and its lock
generations.py     the sample generations in the run folder
spans.py           the timeline of phases and worker calls
report.py          the content of report.html
report_charts.py   its charts and its page
"""
