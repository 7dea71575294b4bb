"""Operations of the decoder: the plain torch reference, and (later) one file per op for cuda and cpu."""
