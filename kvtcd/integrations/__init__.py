"""Where engines meet kvtcd: each module speaks one engine's own interface."""
