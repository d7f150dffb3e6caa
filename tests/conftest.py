pytest_plugins = ["suite", "postgres_server"]
