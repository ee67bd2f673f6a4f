"""The Ray side of a job: replicas, the rendezvous of their workers, generations, commands and reports."""
