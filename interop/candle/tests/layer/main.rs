//! Layers in candle's graph, against the same in candle's own operations.

mod autograd;
mod exchange;
mod in_candle;
mod inference;
mod inputs;
mod losses;
mod random;
mod ranks;
mod weights;
