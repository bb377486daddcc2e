//! Arguments of which shells complete the known values.

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use std::ffi::OsStr;

/// A text. Shells complete the values that the function returns, and any other text is a value, too,
/// because an unknown name has a better error than clap's.
#[derive(Clone, Copy, Debug)]
pub struct Completed(pub fn() -> Vec<String>);

impl TypedValueParser for Completed {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new((self.0)().into_iter().map(PossibleValue::new)))
    }
}
