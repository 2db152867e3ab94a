"""Operations in vLLM V0's forms that need no twin."""
