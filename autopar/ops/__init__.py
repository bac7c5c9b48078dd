"""Operations of autopar's own (``autopar.*``), registered with torch."""
