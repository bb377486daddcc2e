use crate::console::Console;
use crate::failure::Result;
#[derive(clap::Args, Debug)]
pub struct DoctorArgs {}
pub fn execute(_: &DoctorArgs, _: &Console) -> Result { Ok(()) }
