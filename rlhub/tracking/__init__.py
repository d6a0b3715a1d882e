"""What can be seen of a run; README.md lists the trackers and the metrics.

tracker.py       the Tracker interface, which console, mlflow, swanlab, tensorboard, trackio and wandb implement
registry.py      their names
recorder.py      receives everything from a training loop, writes it down and passes it on to the trackers
run_folder.py    the run's folder and its lock; metrics_log.py and generations.py are files in it
spans.py         what ran when, and how worker calls are timed
report.py        report.html, made of report_charts.py and report_page.py
"""
