"""Control process of a run in a cluster, which also reports to the operator."""
