//! A machine that runs PTX, and says what is wrong with it.
