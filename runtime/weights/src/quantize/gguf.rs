//! The output as a GGUF file.

use super::folder::Lock;
use super::model::{Model, expert};
use super::output::{Layout, Output, each, has_header, lock};
use super::{MatrixError, QuantizeError, QuantizeEvent, QuantizeReport, Squares};
use crate::gguf_header::MOST_DIMENSIONS;
use crate::{LayerReader, TensorRef};
use moesaic_kernel::DType;
use moesaic_spec::canonical_tensors;
use moesaic_spec::format::{Blocks, LARGEST};
use moesaic_spec::gguf::{self, GgufError, GgufValue};
use moesaic_tensor::{Tensor, WeightSource};
use std::path::Path;
use std::sync::Mutex;

type Watch<'a> = &'a (dyn Fn(QuantizeEvent<'_>) + Sync);

/// The alignment of tensors, GGUF's default.
const ALIGNMENT: u64 = 32;

/// The version of the file format.
const VERSION: u32 = 3;

/// A tensor of the file.
struct Entry<'a> {
    name: String,
    /// Sizes, outermost first.
    shape: Vec<usize>,
    kind: Kind,
    from: From<'a>,
    /// The offset in the file.
    place: u64,
}

/// The element type of a tensor.
#[derive(Clone, Copy)]
enum Kind {
    Numbers(DType),
    Blocks(&'static Blocks),
}

/// The origin of a tensor.
enum From<'a> {
    /// A tensor outside of the layers with experts.
    Source(TensorRef<'a>),
    /// A canonical tensor of a layer, by the index of the layer.
    Canonical(usize, String),
}

/// Quantizes `model` into the GGUF file `to`.
pub(super) fn write(
    model: &Model,
    to: &Path,
    blocks: &'static Blocks,
    watch: Watch<'_>,
) -> Result<QuantizeReport, QuantizeError> {
    let readers = model.readers()?;
    let keys = keys(model)?;
    let mut entries = entries(model, blocks)?;
    let layout = place(&mut entries, &keys);
    let name = to.file_name().unwrap_or_default().to_string_lossy();
    let _lock = Lock::take(&to.with_file_name(format!(".moesaic-{name}.lock")))?;
    let bytes_before = model.bytes()?;
    watch(QuantizeEvent::Begins {
        bytes: bytes_before,
    });
    let finished = is_finished(to, &layout)?;
    let output = if finished {
        // The header says nothing of the values: another model's file may have the same.
        Output::compare(to, &layout)?
    } else {
        Output::create(to, &layout)?
    };
    let matrices = Mutex::new(Vec::new());
    each(entries.iter().collect(), watch, |entry| {
        let error = entry.write(&output, &readers)?;
        if let Some(error) = error {
            lock(&matrices).push(error);
        }
        Ok(entry.source_bytes(model))
    })?;
    output.finish()?;
    watch(if finished {
        QuantizeEvent::Kept { file: &name }
    } else {
        QuantizeEvent::Written {
            file: &name,
            bytes: layout.bytes,
        }
    });
    let mut matrices = std::mem::take(&mut *lock(&matrices));
    matrices.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(QuantizeReport {
        matrices,
        bytes_before,
        bytes_after: layout.bytes,
    })
}

/// Returns true if there is a file with this header. A file with another one is in the way.
fn is_finished(to: &Path, layout: &Layout) -> Result<bool, QuantizeError> {
    if !to.exists() || has_header(to, layout).unwrap_or(false) {
        return Ok(to.exists());
    }
    Err(QuantizeError::InTheWay {
        path: to.to_path_buf(),
    })
}

/// Returns the keys of the model, with which every layer reads back as it is.
fn keys(model: &Model) -> Result<Vec<(String, GgufValue)>, QuantizeError> {
    let first = &model.layers[0].import.spec;
    let architecture = gguf::architecture_for(first);
    let architecture = architecture.ok_or_else(|| GgufError::NoArchitectureFor {
        layer: first.name.clone(),
        families: gguf::written_families(),
    })?;
    let count = model.layers.last().map_or(0, |layer| layer.index + 1);
    let keys = gguf::keys_for(first, architecture, count);
    for layer in &model.layers {
        gguf::check_keys(&layer.import.spec, layer.index, &keys)?;
    }
    Ok(keys)
}

fn entries<'a>(model: &'a Model, blocks: &'static Blocks) -> Result<Vec<Entry<'a>>, QuantizeError> {
    let (mut entries, mut replaced) = (Vec::new(), Vec::new());
    for (at, layer) in model.layers.iter().enumerate() {
        let experts = layer.expert_matrices();
        for tensor in canonical_tensors(&layer.import.spec) {
            let source = layer.source(&tensor.name);
            let held = source.and_then(|source| model.held(source));
            let held = held.ok_or_else(|| layer.unsupported(&tensor.name, "no recipe reads it"))?;
            let name = gguf::tensor_name(&tensor.name, layer.index);
            let quantized = experts.contains(&tensor);
            let kind = if quantized {
                let kind = fitting(blocks, &tensor.shape);
                Kind::Blocks(kind.map_err(QuantizeError::encode(&tensor.name))?)
            } else {
                Kind::Numbers(narrow(model, &held.names()[0], tensor.dtype))
            };
            entries.push(Entry {
                name: name.unwrap_or_default(),
                shape: tensor.shape,
                kind,
                from: From::Canonical(at, tensor.name),
                place: 0,
            });
            replaced.extend(held.names());
        }
    }
    replaced.sort();
    for name in model.checkpoint.names() {
        let known = replaced
            .binary_search_by(|other| other.as_str().cmp(name))
            .is_ok();
        let Some(tensor) = model.checkpoint.find(name)?.filter(|_| !known) else {
            continue;
        };
        let unsupported = |reason: String| QuantizeError::Unsupported {
            tensor: name.to_string(),
            layer: "the model".to_string(),
            reason,
        };
        let other = |other| unsupported(format!("GGUF has no elements of type {other:?}"));
        let dtype = tensor.dtype.map_err(other)?;
        let dimensions = tensor.shape.len();
        if dimensions > MOST_DIMENSIONS as usize {
            let reason = format!("{dimensions} dimensions are more than GGUF's {MOST_DIMENSIONS}");
            return Err(unsupported(reason));
        }
        entries.push(Entry {
            name: name.to_string(),
            shape: tensor.shape.to_vec(),
            kind: Kind::Numbers(dtype),
            from: From::Source(tensor),
            place: 0,
        });
    }
    Ok(entries)
}

/// Returns the type of blocks of which a row is a whole number.
fn fitting(
    blocks: &'static Blocks,
    shape: &[usize],
) -> Result<&'static Blocks, moesaic_spec::format::EncodeError> {
    let columns = shape.last().copied().unwrap_or_default();
    let smaller = match blocks.name {
        "Q4_K" => "Q5_0",
        "Q5_K" => "Q5_1",
        "Q6_K" => "Q8_0",
        other => other,
    };
    let named = |blocks: &&Blocks| blocks.name == smaller;
    let smaller = moesaic_spec::format::BLOCKS
        .iter()
        .find(named)
        .unwrap_or(blocks);
    let fit = [blocks, smaller].into_iter();
    let fit = fit
        .into_iter()
        .find(|blocks| columns.is_multiple_of(blocks.elements));
    fit.ok_or(moesaic_spec::format::EncodeError::Columns {
        format: smaller.name,
        columns,
        multiple: smaller.elements,
    })
}

/// Returns the type in which the source holds a weight. A router is f32, as llama.cpp has it.
fn narrow(model: &Model, name: &str, canonical: DType) -> DType {
    if !canonical.is_float() || canonical != DType::F32 {
        return canonical;
    }
    let held = model
        .checkpoint
        .tensor(name)
        .and_then(|tensor| tensor.dtype.ok());
    held.filter(|dtype| dtype.is_float()).unwrap_or(canonical)
}

impl Kind {
    fn id(self) -> u32 {
        match self {
            Kind::Numbers(dtype) => gguf::number_id(dtype),
            Kind::Blocks(blocks) => blocks.id,
        }
    }

    fn bytes(self, elements: usize) -> usize {
        match self {
            Kind::Numbers(dtype) => elements * dtype.size(),
            Kind::Blocks(blocks) => elements / blocks.elements * blocks.bytes,
        }
    }
}

impl Entry<'_> {
    fn bytes(&self) -> usize {
        self.kind.bytes(self.shape.iter().product())
    }

    fn source_bytes(&self, model: &Model) -> u64 {
        match &self.from {
            From::Source(tensor) => tensor.bytes.len() as u64,
            From::Canonical(at, name) => {
                let layer = &model.layers[*at];
                let held = layer.source(name).and_then(|source| model.held(source));
                let name = held.and_then(|held| held.names().into_iter().next());
                let tensor = name.and_then(|name| model.checkpoint.tensor(&name));
                let size = tensor.map_or(2, |tensor| {
                    tensor.bytes.len() / tensor.shape.iter().product::<usize>().max(1)
                });
                (self.shape.iter().product::<usize>() * size) as u64
            }
        }
    }

    /// Writes the tensor. Returns its error if it is quantized.
    fn write(
        &self,
        output: &Output,
        readers: &[LayerReader<'_>],
    ) -> Result<Option<MatrixError>, QuantizeError> {
        match (&self.from, self.kind) {
            (From::Source(tensor), _) => {
                tensor.check_length()?;
                output.put(self.place, tensor.bytes)?;
                Ok(None)
            }
            (From::Canonical(at, name), Kind::Blocks(blocks)) => {
                self.encode(output, &readers[*at], name, blocks).map(Some)
            }
            (From::Canonical(at, name), Kind::Numbers(dtype)) => {
                let rows = self.shape.first().copied().unwrap_or(1);
                let row = self.bytes() / rows.max(1);
                for at_row in 0..rows {
                    let bytes = numbers(&readers[*at], name, at_row, dtype)?;
                    output.put(self.place + (at_row * row) as u64, &bytes)?;
                }
                Ok(None)
            }
        }
    }

    /// Encodes the experts one by one.
    fn encode(
        &self,
        output: &Output,
        reader: &LayerReader<'_>,
        name: &str,
        blocks: &'static Blocks,
    ) -> Result<MatrixError, QuantizeError> {
        let (columns, experts) = (self.shape[2], self.shape[0]);
        let (mut squares, bytes) = (Squares::default(), self.bytes() / experts.max(1));
        for at in 0..experts {
            let values = expert(reader, name, at)?;
            let encoded = blocks.encode(&values, columns);
            let encoded = encoded.map_err(QuantizeError::encode(&format!(
                "{}, expert {at}",
                self.name
            )))?;
            let mut found = [0f32; LARGEST];
            let pairs = values
                .chunks_exact(blocks.elements)
                .zip(encoded.chunks_exact(blocks.bytes));
            for (values, block) in pairs {
                blocks.decode(block, &mut found);
                squares.add(values, &found[..values.len()]);
            }
            output.put(self.place + (at * bytes) as u64, &encoded)?;
        }
        Ok(MatrixError {
            name: self.name.clone(),
            format: blocks.name.to_string(),
            relative_rms: squares.relative_rms(),
        })
    }
}

/// Reads a row of a canonical tensor in a type that holds it exactly.
fn numbers(
    reader: &LayerReader<'_>,
    name: &str,
    row: usize,
    dtype: DType,
) -> Result<Vec<u8>, QuantizeError> {
    if dtype.is_float() {
        let values = expert(reader, name, row)?;
        return Ok(Tensor::rounded(dtype, &[values.len()], &values)
            .data
            .to_vec());
    }
    let rows = reader.rows(name, row..row + 1);
    let rows = rows.map_err(|error| GgufError::CannotSay {
        layer: name.to_string(),
        what: error.to_string(),
    })?;
    Ok(rows.data.to_vec())
}

/// Writes the header, and gives the tensors their places.
fn place(entries: &mut [Entry<'_>], keys: &[(String, GgufValue)]) -> Layout {
    let mut header = [b"GGUF", &VERSION.to_le_bytes()[..]].concat();
    let count = |count: usize| (count as u64).to_le_bytes();
    header.extend(count(entries.len()));
    header.extend(count(keys.len()));
    for (key, value) in keys {
        put_text(&mut header, key);
        put_value(&mut header, value);
    }
    let mut end = 0u64;
    for entry in entries.iter_mut() {
        put_text(&mut header, &entry.name);
        header.extend((entry.shape.len() as u32).to_le_bytes());
        // The innermost size comes first.
        header.extend(entry.shape.iter().rev().flat_map(|size| count(*size)));
        header.extend(entry.kind.id().to_le_bytes());
        header.extend(end.to_le_bytes());
        entry.place = end;
        end = (end + entry.bytes() as u64).next_multiple_of(ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
    let data = header.len() as u64;
    entries.iter_mut().for_each(|entry| entry.place += data);
    Layout {
        header,
        bytes: data + end,
    }
}

fn put_text(header: &mut Vec<u8>, text: &str) {
    header.extend((text.len() as u64).to_le_bytes());
    header.extend(text.as_bytes());
}

/// Writes a value by the types that llama.cpp reads: u32, f32, bool and string.
fn put_value(header: &mut Vec<u8>, value: &GgufValue) {
    match value {
        GgufValue::Int(value) => {
            header.extend(4u32.to_le_bytes());
            header.extend((*value as u32).to_le_bytes());
        }
        GgufValue::Float(value) => {
            header.extend(6u32.to_le_bytes());
            header.extend((*value as f32).to_le_bytes());
        }
        GgufValue::Bool(value) => {
            header.extend(7u32.to_le_bytes());
            header.push(u8::from(*value));
        }
        GgufValue::Text(text) => {
            header.extend(8u32.to_le_bytes());
            put_text(header, text);
        }
        // Keys of models have none.
        GgufValue::List(_) => {}
    }
}
