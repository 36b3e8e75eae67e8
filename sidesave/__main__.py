"""``python -m sidesave``: the ``sidesave`` command, where no such script is in the path."""

from sidesave.client.cli.main import main

if __name__ == "__main__":
    main()
