//! Layers in candle's graph, against the same in candle's own operations.

mod autograd;
mod exchange;
mod in_candle;
mod inputs;
mod losses;
mod random;
mod ranks;
