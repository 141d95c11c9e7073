"""MyMixer, a token mixer for seqarch."""

from my_mixer.mixer import MyMixer

__all__ = ["MyMixer"]
