//! Tokens from a file, converted to the types that a layer takes.

use super::file_tensors::{counts, expect_shape, find, floats, infinite, integers, mask_of};
use crate::console::Console;
use crate::failure::{Failure, Result};
use crate::random;
use moesaic::spec::{Chooser, LossKind, Router, RouterKind};
use moesaic::train::replay::Replay;
use moesaic::weights::Checkpoint;
use moesaic::{DType, Input, LayerSpec, Tensor, Tensors};
use std::ops::Range;
use std::path::Path;

/// The inputs of a layer's call.
pub struct Tokens<'a> {
    /// The number of tokens.
    pub count: usize,
    /// The capacity factor of the call, in place of the spec's.
    pub capacity_factor: Option<f64>,
    tensors: Tensors<'a>,
}

/// The inputs of losses; those of a larger group than the call are behind the first.
const OF_LOSSES: [&str; 3] = ["sequence_ids", "global_counts", "global_tokens"];

/// Opens an input file.
pub fn open(path: &Path) -> Result<Checkpoint> {
    if path.is_dir() {
        return Err(Failure::input(format!(
            "--input {} is a directory, not a file",
            path.display()
        )));
    }
    Ok(Checkpoint::open(path)?)
}

/// Returns the number of tokens in an input file.
pub fn count(file: &Checkpoint, spec: &LayerSpec) -> Result<usize> {
    let sizes = [None, Some(spec.shape.model_dim)];
    expect_shape(&find(file, "x")?, &sizes, "[tokens, model_dim]")
}

impl<'a> Tokens<'a> {
    /// Finds, checks and converts the tensors that the layer needs.
    pub fn read(file: &'a Checkpoint, spec: &LayerSpec, console: &Console) -> Result<Tokens<'a>> {
        if file.tensor("router_ids").is_some() {
            let message = "`router_ids` name a router for each token, and a run has one router";
            return Err(Failure::input(message)
                .hint("in Rust, MultiGate::forward_by_token takes them; or leave them out"));
        }
        let (x, count) = (find(file, "x")?, count(file, spec)?);
        let wanted = spec.precision.activations;
        let mut tokens = Tokens {
            count,
            capacity_factor: None,
            tensors: Tensors::new(),
        };
        let rounded = floats(&x, wanted)?;
        if x.dtype == Ok(DType::F32) && wanted != DType::F32 {
            let (before, after) = (infinite(&floats(&x, DType::F32)?), infinite(&rounded));
            let lost = match after.saturating_sub(before) {
                0 => String::new(),
                1 => "; 1 value becomes infinite".to_string(),
                lost => format!("; {lost} values become infinite"),
            };
            console.note(&format!(
                "x is f32 and is rounded to the layer's {wanted}{lost}"
            ));
        }
        tokens.insert("x", rounded);
        match spec.router.kind.chooser() {
            Chooser::Table => {
                let ids = find(file, "token_ids")?;
                expect_shape(&ids, &[Some(count)], "[tokens]")?;
                tokens.insert("token_ids", integers(&ids)?);
            }
            Chooser::Caller => tokens.routing(file, spec)?,
            Chooser::Scores => {}
        }
        tokens.masks(file, spec)?;
        Ok(tokens)
    }

    /// Returns random tokens, and what else the layer takes.
    pub fn random(spec: &LayerSpec, count: usize) -> Tokens<'static> {
        let mut tensors = random::input(spec, count).tensors;
        // Those of losses follow by themselves if the call has losses.
        tensors.retain(|name, _| !OF_LOSSES.contains(&name.as_str()));
        Tokens {
            count,
            capacity_factor: None,
            tensors,
        }
    }

    /// Draws the gradient of the output as well.
    pub fn draw_dy(&mut self, spec: &LayerSpec) {
        self.insert("dy", random::output_gradient(spec, self.count));
    }

    /// Draws the inputs of losses. Ranks that share the tokens count them themselves.
    pub fn draw_groups(&mut self, spec: &LayerSpec, ranks: bool) {
        let all = random::input(spec, self.count).tensors;
        let wanted = if ranks { &OF_LOSSES[..1] } else { &OF_LOSSES };
        for (name, tensor) in all
            .iter()
            .filter(|(name, _)| wanted.contains(&name.as_str()))
        {
            self.insert(name, tensor.clone());
        }
    }

    /// Reads the gradient of the output as well.
    pub fn read_dy(&mut self, file: &'a Checkpoint, spec: &LayerSpec) -> Result {
        let dy = find(file, "dy")?;
        let shape = [Some(self.count), Some(spec.output_dim())];
        expect_shape(&dy, &shape, "[tokens, output_dim]")?;
        self.insert("dy", floats(&dy, spec.precision.activations)?);
        Ok(())
    }

    /// Reads the masks of tokens and slots.
    fn masks(&mut self, file: &'a Checkpoint, spec: &LayerSpec) -> Result {
        if spec.router.token_mask {
            let mask = find(file, "token_mask")?;
            expect_shape(&mask, &[Some(self.count)], "[tokens]")?;
            self.insert("token_mask", mask_of(&mask)?);
        }
        if spec.router.active_k {
            let active = find(file, "active_k")?;
            expect_shape(&active, &[Some(1)], "[1]")?;
            self.insert("active_k", integers(&active)?);
        }
        Ok(())
    }

    /// Reads the inputs of losses: sequences, and the counts of a larger group. Ranks that share
    /// the tokens compute these counts themselves.
    pub fn read_groups(&mut self, file: &'a Checkpoint, spec: &LayerSpec, ranks: bool) -> Result {
        for loss in &spec.losses {
            match (loss.kind, loss.sequence_length) {
                (LossKind::Sequence, None) => {
                    let ids = find(file, "sequence_ids")?;
                    expect_shape(&ids, &[Some(self.count)], "[tokens]")?;
                    self.insert("sequence_ids", integers(&ids)?);
                }
                (LossKind::Global, _) if !ranks => {
                    let sizes = [spec.routed_experts(), 1];
                    for (name, size) in ["global_counts", "global_tokens"].into_iter().zip(sizes) {
                        let tensor = find(file, name)?;
                        expect_shape(&tensor, &[Some(size)], "all of the group")?;
                        self.insert(name, counts(&tensor)?);
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Reads the tokens of a file, with the experts and weights of a routing record.
    pub fn replay(
        file: &'a Checkpoint,
        record: &Path,
        spec: &LayerSpec,
        console: &Console,
    ) -> Result<Tokens<'a>> {
        let inner = LayerSpec {
            router: Router::default(),
            ..spec.clone()
        };
        let mut tokens = Tokens::read(file, &inner, console)?;
        let (ids, weights) = super::record::choices(record, spec, tokens.count)?;
        let shape = [tokens.count, spec.shape.top_k];
        tokens.insert("topk_ids", Tensor::owned(&shape, ids));
        tokens.insert("topk_weights", Tensor::owned(&shape, weights));
        Ok(tokens)
    }

    /// Reads the tokens of a file for a layer that looks its experts up in a record. The file's
    /// `token_ids` are their places in it; without any, they are the record's tokens in order.
    pub fn placed(
        file: &'a Checkpoint,
        replayed: &Replay,
        console: &Console,
    ) -> Result<Tokens<'a>> {
        if file.tensor("token_ids").is_some() {
            return Tokens::read(file, &replayed.spec, console);
        }
        let inner = LayerSpec {
            router: Router {
                kind: RouterKind::Linear,
                table_rows: None,
                ..replayed.spec.router.clone()
            },
            ..replayed.spec.clone()
        };
        let mut tokens = Tokens::read(file, &inner, console)?;
        let (count, recorded) = (tokens.count, replayed.table.shape[0]);
        if count != recorded {
            let message = format!("the record has {recorded} tokens, and the input {count}");
            return Err(Failure::input(message)
                .hint("put the tokens' places in the record into the input, as `token_ids`"));
        }
        let places = (0..count as i32).collect();
        tokens.insert("token_ids", Tensor::owned(&[count], places));
        Ok(tokens)
    }

    fn routing(&mut self, file: &'a Checkpoint, spec: &LayerSpec) -> Result {
        let shape = [Some(self.count), Some(spec.shape.top_k)];
        let (ids, weights) = (find(file, "topk_ids")?, find(file, "topk_weights")?);
        for tensor in [&ids, &weights] {
            expect_shape(tensor, &shape, "[tokens, top_k]")?;
        }
        self.insert("topk_ids", integers(&ids)?);
        self.insert("topk_weights", floats(&weights, DType::F32)?);
        Ok(())
    }

    fn insert(&mut self, name: &str, tensor: Tensor<'a>) {
        self.tensors.insert(name, tensor);
    }

    /// Returns the tensor of this name.
    pub fn get(&self, name: &str) -> Option<&Tensor<'a>> {
        self.tensors.get(name)
    }

    /// Returns all tensors of the call.
    pub fn all(&self) -> &Tensors<'a> {
        &self.tensors
    }

    /// Returns a range of the tokens.
    pub fn share(&self, tokens: &Range<usize>) -> Result<Tokens<'_>> {
        let part = |(name, tensor): (&String, &'_ Tensor<'a>)| {
            let part = match name.as_str() {
                "active_k" => tensor.clone(),
                _ => tensor
                    .rows(tokens.clone())
                    .map_err(Failure::work)?
                    .into_static(),
            };
            Ok((name.clone(), part))
        };
        Ok(Tokens {
            count: tokens.len(),
            capacity_factor: self.capacity_factor,
            tensors: self.tensors.iter().map(part).collect::<Result<_>>()?,
        })
    }

    /// Returns the layer's input.
    pub fn input(&self) -> Input<'_> {
        Input {
            tokens: self.count,
            tensors: self.tensors.lend(),
            capacity_factor: self.capacity_factor,
        }
    }
}
