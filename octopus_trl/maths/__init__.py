"""Pure torch functions of the model and the objective: any dtype, CPU, no state (README.md)."""
