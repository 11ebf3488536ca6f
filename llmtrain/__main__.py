"""`python -m llmtrain`."""

from llmtrain.cli.main import main

if __name__ == "__main__":
    main()
