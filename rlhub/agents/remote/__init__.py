"""Episodes and environments in actors of their own, so that their CPU work does not hold up the driver."""
