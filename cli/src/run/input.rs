//! Tokens from a file, in the types that a layer takes.

use crate::console::Console;
use crate::failure::{Failure, Result};
use moesaic::half::{bf16, f16};
use moesaic::spec::{LossKind, Router, RouterKind};
use moesaic::weights::{Checkpoint, TensorRef};
use moesaic::{DType, HostTensor, Input, LayerSpec};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// What a layer is called with.
pub struct Tokens<'a> {
    /// Tokens.
    pub count: usize,
    /// The capacity factor of the call instead of the spec's.
    pub capacity_factor: Option<f64>,
    tensors: BTreeMap<String, HostTensor<'a>>,
}

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

/// The tokens of an input file.
pub fn count(file: &Checkpoint, spec: &LayerSpec) -> Result<usize> {
    let sizes = [None, Some(spec.shape.model_dim)];
    expect_shape(&find(file, "x")?, &sizes, "[tokens, model_dim]")
}

impl<'a> Tokens<'a> {
    /// Finds, checks and converts the tensors that the layer needs.
    pub fn read(file: &'a Checkpoint, spec: &LayerSpec, console: &Console) -> Result<Tokens<'a>> {
        let (x, count) = (find(file, "x")?, count(file, spec)?);
        let wanted = spec.precision.activations;
        if x.dtype == Ok(DType::F32) && wanted != DType::F32 {
            console.note(&format!("x is f32 and is rounded to the layer's {wanted}"));
        }
        let mut tokens = Tokens {
            count,
            capacity_factor: None,
            tensors: BTreeMap::new(),
        };
        tokens.insert("x", floats(&x, wanted)?);
        match spec.router.kind {
            RouterKind::Table => {
                let ids = find(file, "token_ids")?;
                expect_shape(&ids, &[Some(count)], "[tokens]")?;
                tokens.insert("token_ids", integers(&ids)?);
            }
            RouterKind::External => tokens.routing(file, spec)?,
            RouterKind::Linear | RouterKind::Cosine => {}
        }
        tokens.masks(file, spec)?;
        Ok(tokens)
    }

    /// Reads the gradient of the output as well.
    pub fn read_dy(&mut self, file: &'a Checkpoint, spec: &LayerSpec) -> Result {
        let dy = find(file, "dy")?;
        let shape = [Some(self.count), Some(spec.output_dim())];
        expect_shape(&dy, &shape, "[tokens, output_dim]")?;
        self.insert("dy", floats(&dy, spec.precision.activations)?);
        Ok(())
    }

    /// Reads what masks tokens and slots.
    fn masks(&mut self, file: &'a Checkpoint, spec: &LayerSpec) -> Result {
        if spec.router.token_mask {
            let mask = find(file, "token_mask")?;
            expect_shape(&mask, &[Some(self.count)], "[tokens]")?;
            self.insert("token_mask", integers(&mask)?);
        }
        if spec.router.active_k {
            let active = find(file, "active_k")?;
            expect_shape(&active, &[Some(1)], "[1]")?;
            self.insert("active_k", integers(&active)?);
        }
        Ok(())
    }

    /// Reads what losses need: sequences, and counts of a larger group.
    pub fn read_groups(&mut self, file: &'a Checkpoint, spec: &LayerSpec) -> Result {
        for loss in &spec.losses {
            match (loss.kind, loss.sequence_length) {
                (LossKind::Sequence, None) => {
                    let ids = find(file, "sequence_ids")?;
                    expect_shape(&ids, &[Some(self.count)], "[tokens]")?;
                    self.insert("sequence_ids", integers(&ids)?);
                }
                (LossKind::Global, _) => {
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

    /// The tokens of a file, with the choices of a routing record.
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
        let shape = vec![tokens.count, spec.shape.top_k];
        let held = |dtype, bytes: Vec<u8>| HostTensor {
            dtype,
            shape: shape.clone(),
            data: Cow::Owned(bytes),
        };
        let ids = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        tokens.insert("topk_ids", held(DType::I32, ids));
        tokens.insert(
            "topk_weights",
            held(DType::F32, store(DType::F32, &weights)),
        );
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

    fn insert(&mut self, name: &str, tensor: HostTensor<'a>) {
        self.tensors.insert(name.to_string(), tensor);
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&HostTensor<'a>> {
        self.tensors.get(name)
    }

    /// The call.
    pub fn input(&self) -> Input<'_> {
        Input {
            tokens: self.count,
            tensors: self.tensors.clone(),
            capacity_factor: self.capacity_factor,
        }
    }
}

pub fn find<'a>(file: &'a Checkpoint, name: &str) -> Result<TensorRef<'a>> {
    file.tensor(name).ok_or_else(|| {
        let names: Vec<&str> = file.names().take(9).collect();
        let list = match names.len() {
            0 => "it is empty".to_string(),
            9 => format!("it has {} and more", names[..8].join(", ")),
            _ => format!("it has {}", names.join(", ")),
        };
        Failure::input(format!(
            "{} has no tensor `{name}`; {list}",
            file.path().display()
        ))
    })
}

/// Checks a shape and gives its first size. `None` is any size.
pub fn expect_shape(tensor: &TensorRef<'_>, sizes: &[Option<usize>], words: &str) -> Result<usize> {
    let fits = tensor.shape.len() == sizes.len()
        && tensor
            .shape
            .iter()
            .zip(sizes)
            .all(|(have, want)| want.is_none_or(|want| want == *have));
    if fits {
        return Ok(tensor.shape[0]);
    }
    let expected: Vec<String> = sizes
        .iter()
        .map(|size| size.map_or("tokens".to_string(), |n| n.to_string()))
        .collect();
    let failure = Failure::input(format!(
        "`{}` in {} has shape {:?}, expected [{}], which is {words}",
        tensor.name,
        tensor.file.display(),
        tensor.shape,
        expected.join(", ")
    ));
    match tensor.shape.len() > sizes.len()
        && tensor.shape.last() == sizes.last().and_then(Option::as_ref)
    {
        true => Err(failure.hint("flatten its outer dimensions into one")),
        false => Err(failure),
    }
}

fn wrong_dtype(tensor: &TensorRef<'_>, expected: &str) -> Failure {
    let found = match tensor.dtype {
        Ok(dtype) => dtype.to_string(),
        Err(other) => format!("{other:?}").to_lowercase(),
    };
    Failure::input(format!(
        "`{}` in {} is {found}, expected {expected}",
        tensor.name,
        tensor.file.display()
    ))
}

/// Floats in the wanted type; without a copy when they are.
fn floats<'a>(tensor: &TensorRef<'a>, wanted: DType) -> Result<HostTensor<'a>> {
    let wrong = || wrong_dtype(tensor, "f32, f16 or bf16");
    let dtype = tensor.dtype.map_err(|_| wrong())?;
    let held = HostTensor {
        dtype,
        shape: tensor.shape.to_vec(),
        data: Cow::Borrowed(tensor.bytes),
    };
    match dtype {
        DType::I32 | DType::I64 => Err(wrong()),
        _ if dtype == wanted => Ok(held),
        _ => Ok(HostTensor {
            dtype: wanted,
            data: Cow::Owned(convert(&held, wanted)),
            ..held
        }),
    }
}

/// In pieces: a file may be much larger than the memory to spare.
fn convert(tensor: &HostTensor<'_>, wanted: DType) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(tensor.elements() * wanted.size());
    for piece in tensor.data.chunks(1 << 20) {
        let piece = HostTensor {
            dtype: tensor.dtype,
            shape: vec![piece.len() / tensor.dtype.size()],
            data: Cow::Borrowed(piece),
        };
        bytes.extend(store(wanted, &piece.to_f32()));
    }
    bytes
}

/// The bytes of values in a float type, rounded to nearest.
pub fn store(dtype: DType, values: &[f32]) -> Vec<u8> {
    let values = values.iter();
    match dtype {
        DType::F16 => values
            .flat_map(|&v| f16::from_f32(v).to_le_bytes())
            .collect(),
        DType::Bf16 => values
            .flat_map(|&v| bf16::from_f32(v).to_le_bytes())
            .collect(),
        _ => values.flat_map(|v| v.to_le_bytes()).collect(),
    }
}

/// Numbers of tokens, which are i64.
fn counts<'a>(tensor: &TensorRef<'a>) -> Result<HostTensor<'a>> {
    match tensor.dtype {
        Ok(dtype @ DType::I64) => Ok(HostTensor {
            dtype,
            shape: tensor.shape.to_vec(),
            data: Cow::Borrowed(tensor.bytes),
        }),
        _ => Err(wrong_dtype(tensor, "i64")),
    }
}

/// Integers as i32; a larger one is out of every range of ids.
fn integers<'a>(tensor: &TensorRef<'a>) -> Result<HostTensor<'a>> {
    let wrong = || wrong_dtype(tensor, "i32 or i64");
    let dtype = tensor.dtype.map_err(|_| wrong())?;
    let shape = tensor.shape.to_vec();
    let held = HostTensor {
        dtype,
        shape,
        data: Cow::Borrowed(tensor.bytes),
    };
    match dtype {
        DType::I32 => Ok(held),
        DType::I64 => {
            let narrow = |v: &i64| i32::try_from(*v).unwrap_or(i32::MAX).to_le_bytes();
            let values: Vec<i64> = held.to_vec().unwrap_or_default();
            let data = Cow::Owned(values.iter().flat_map(narrow).collect());
            Ok(HostTensor {
                dtype: DType::I32,
                data,
                ..held
            })
        }
        _ => Err(wrong()),
    }
}
