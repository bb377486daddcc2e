use crate::console::Console;
use crate::failure::Result;
#[derive(clap::Args, Debug)]
pub struct BenchArgs {}
pub fn execute(_: &BenchArgs, _: &Console) -> Result { Ok(()) }
