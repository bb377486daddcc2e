//! From a prompt to text, with the time of both parts.

use crate::model::Model;
use crate::sampling::Sampler;
use candle_core::{Error, Result};
use std::path::Path;
use std::time::{Duration, Instant};
use tokenizers::Tokenizer;

/// The number of prompt tokens that run in one call. It bounds the memory of attention's scores.
const CHUNK: usize = 512;

/// The tokens of a run, and the times that they took.
#[derive(Clone, Debug, Default)]
pub struct Generated {
    pub tokens: Vec<u32>,
    /// The time from the prompt to the first token.
    pub prefill: Duration,
    /// The time of all further calls, of one token each.
    pub decode: Duration,
    /// The number of these calls: an end token takes one, and is not in `tokens`.
    pub steps: usize,
}

impl Generated {
    /// Returns the tokens per second of the prompt and of what follows.
    pub fn speeds(&self, prompt: usize) -> [f64; 2] {
        let speed = |tokens: usize, time: Duration| match tokens {
            0 => 0.0,
            tokens => tokens as f64 / time.as_secs_f64().max(1e-9),
        };
        let decode = speed(self.steps, self.decode);
        [speed(prompt, self.prefill), decode]
    }
}

/// Generates up to `most` tokens after a prompt, and gives each to `show`.
///
/// # Errors
/// The prompt is empty, or the model does not run.
pub fn generate(
    model: &mut Model,
    sampler: &mut Sampler,
    prompt: &[u32],
    most: usize,
    mut show: impl FnMut(u32) -> Result<()>,
) -> Result<Generated> {
    if prompt.is_empty() {
        candle_core::bail!("the prompt has no tokens");
    }
    let mut generated = Generated::default();
    let mut next = |model: &mut Model, tokens: &[u32]| -> Result<u32> {
        let states = model.forward(tokens)?;
        let last = states.narrow(0, tokens.len() - 1, 1)?;
        sampler.next(&model.logits(&last)?.squeeze(0)?)
    };
    let start = Instant::now();
    let last = (prompt.len() - 1) / CHUNK * CHUNK;
    for chunk in prompt[..last].chunks(CHUNK) {
        model.forward(chunk)?;
    }
    let mut token = next(model, &prompt[last..])?;
    generated.prefill = start.elapsed();
    let start = Instant::now();
    while generated.tokens.len() < most && !model.config().ends.contains(&token) {
        generated.tokens.push(token);
        show(token)?;
        if generated.tokens.len() < most {
            token = next(model, &[token])?;
            generated.steps += 1;
        }
    }
    generated.decode = start.elapsed();
    Ok(generated)
}

/// Reads the `tokenizer.json` of a folder.
///
/// # Errors
/// It is missing, or not as the crate `tokenizers` reads it.
pub fn tokenizer(folder: &Path) -> Result<Tokenizer> {
    let path = folder.join("tokenizer.json");
    let read = Tokenizer::from_file(&path);
    read.map_err(|error| Error::Msg(format!("{}: {error}", path.display())))
}

/// Returns a function from each token after a prompt to the text that it adds: none while a
/// character lacks bytes.
///
/// # Errors
/// The tokenizer does not decode the prompt.
pub fn pieces<'t>(
    tokenizer: &'t Tokenizer,
    prompt: &[u32],
) -> Result<impl FnMut(u32) -> Result<String> + use<'t>> {
    let mut stream = tokenizer.decode_stream(true);
    let mut piece = move |token| {
        let text = stream.step(token).map_err(Error::wrap)?;
        Ok(text.unwrap_or_default())
    };
    // The text of a token may depend on those before it, such as the space between two words.
    for token in prompt {
        piece(*token)?;
    }
    Ok(piece)
}
