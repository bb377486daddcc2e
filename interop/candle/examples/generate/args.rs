//! The command line.

use crate::sampling::Sampling;
use std::path::PathBuf;

/// The request of a command line.
#[derive(Clone, Debug, PartialEq)]
pub struct Args {
    pub model: PathBuf,
    pub prompt: String,
    pub tokens: usize,
    pub sampling: Sampling,
}

impl Args {
    /// Reads the words of a command line, without the program's name. `None` asks for the help.
    ///
    /// # Errors
    /// An option is unknown, lacks its value or has one that does not fit.
    pub fn read(words: impl IntoIterator<Item = String>) -> Result<Option<Args>, String> {
        let mut words = words.into_iter();
        let (mut model, mut prompt) = (None, None);
        let mut tokens = 64;
        let mut sampling = Sampling {
            temperature: 0.0,
            top_k: None,
            top_p: None,
            seed: 0,
        };
        while let Some(option) = words.next() {
            if option == "--help" || option == "-h" {
                return Ok(None);
            }
            let value = words.next();
            let value = || value.ok_or_else(|| format!("`{option}` needs a value"));
            match option.as_str() {
                "--model" => model = Some(PathBuf::from(value()?)),
                "--prompt" => prompt = Some(value()?),
                "--tokens" => tokens = number(&option, &value()?)?,
                "--temperature" => sampling.temperature = number(&option, &value()?)?,
                "--top-k" => sampling.top_k = Some(number(&option, &value()?)?),
                "--top-p" => sampling.top_p = Some(number(&option, &value()?)?),
                "--seed" => sampling.seed = number(&option, &value()?)?,
                _ => return Err(format!("`{option}` is no option, see --help")),
            }
        }
        check(&sampling)?;
        let needed = |option| format!("`{option}` is missing, see --help");
        Ok(Some(Args {
            model: model.ok_or_else(|| needed("--model"))?,
            prompt: prompt.ok_or_else(|| needed("--prompt"))?,
            tokens,
            sampling,
        }))
    }
}

fn number<N: std::str::FromStr>(option: &str, value: &str) -> Result<N, String> {
    let none = |_| format!("`{option} {value}` is no number that fits");
    value.parse().map_err(none)
}

fn check(sampling: &Sampling) -> Result<(), String> {
    if !sampling.temperature.is_finite() || sampling.temperature < 0.0 {
        return Err("`--temperature` is 0 or more".to_string());
    }
    if sampling.top_k == Some(0) {
        return Err("`--top-k` is 1 or more".to_string());
    }
    if sampling.top_p.is_some_and(|p| !(p > 0.0 && p <= 1.0)) {
        return Err("`--top-p` is above 0 and at most 1".to_string());
    }
    let samples = sampling.top_k.is_some() || sampling.top_p.is_some();
    if samples && sampling.temperature == 0.0 {
        return Err("`--top-k` and `--top-p` need a `--temperature` above 0".to_string());
    }
    Ok(())
}
