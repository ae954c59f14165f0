"""Objects of a job: pods, what they mount, and the objects of schedulers."""
