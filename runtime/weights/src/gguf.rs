//! GGUF files mapped into memory: one file, or the shards of a model.

use crate::gguf_header::{Header, Info, Kind, read_header};
use crate::regular;
use crate::{Damage, WeightsError};
use moesaic_spec::gguf::{Metadata, TensorInfo};
use moesaic_tensor::Map;
use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The first bytes of a file.
const MAGIC: &[u8; 4] = b"GGUF";

/// The largest accepted number of shards.
const MOST_SHARDS: u64 = 9_999;

/// The tensors of a GGUF file and of its other shards.
#[derive(Debug)]
pub(crate) struct Gguf {
    shards: Vec<Shard>,
    /// The place of each tensor.
    names: BTreeMap<String, Place>,
    pub metadata: Metadata,
}

/// The place of a tensor in the files.
#[derive(Clone, Copy, Debug)]
struct Place {
    shard: usize,
    /// The index among the tensors of the shard.
    index: usize,
}

#[derive(Debug)]
struct Shard {
    file: PathBuf,
    map: Arc<Map>,
    infos: Vec<Info>,
}

/// A tensor and its place.
pub(crate) struct Found<'a> {
    pub name: &'a str,
    pub file: &'a Path,
    pub map: &'a Arc<Map>,
    pub info: &'a Info,
}

/// ggml's names of unsupported types.
const UNREAD: [(u32, &str); 20] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (40, "NVFP4"),
];

/// Returns ggml's name of an unsupported type.
pub(crate) fn unread(id: u32) -> String {
    let known = UNREAD.iter().find(|(known, _)| *known == id);
    known.map_or(format!("{id} of ggml's"), |(_, name)| name.to_string())
}

/// Returns true if the file begins as GGUF files do.
pub(crate) fn is_gguf(path: &Path) -> bool {
    let mut start = [0; 4];
    let file = regular::open(path).is_ok_and(|mut file| file.read_exact(&mut start).is_ok());
    file && start == *MAGIC
}

/// Returns the files of the model at a path: all shards if the file is one of several, or those of
/// a directory's only model.
pub(crate) fn files_of(path: &Path) -> Vec<PathBuf> {
    let first = if path.is_dir() {
        match models(path).as_slice() {
            [only] => only.clone(),
            _ => return Vec::new(),
        }
    } else {
        path.to_path_buf()
    };
    match Split::of(&first) {
        Some(split) => split.files(),
        None => vec![first],
    }
}

/// Returns the models of a directory: single files, and the first shard of each sharded model.
pub(crate) fn models(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let mut paths: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|end| end == "gguf"))
        .filter(|path| Split::of(path).is_none_or(|split| split.number == 1))
        .collect();
    paths.sort();
    paths
}

/// The parts of a shard's name, `PREFIX-00001-of-00003.gguf`.
struct Split {
    dir: PathBuf,
    prefix: String,
    number: u64,
    count: u64,
}

impl Split {
    fn of(path: &Path) -> Option<Split> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| {
            // llama.cpp writes exactly five digits; other names are not parts of a split model.
            let all = text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
            all.then(|| text.parse::<u64>().ok())?
        };
        let (number, count) = (digits(number)?, digits(count)?);
        let fits = (1..=MOST_SHARDS).contains(&count) && (1..=count).contains(&number);
        fits.then(|| Split {
            dir: path.parent().unwrap_or(Path::new("")).to_path_buf(),
            prefix: prefix.to_string(),
            number,
            count,
        })
    }

    fn files(&self) -> Vec<PathBuf> {
        let name = |number| format!("{}-{number:05}-of-{:05}.gguf", self.prefix, self.count);
        (1..=self.count)
            .map(|number| self.dir.join(name(number)))
            .collect()
    }
}

impl Gguf {
    /// Opens a file, and its other shards if it has some.
    pub fn open(path: &Path) -> Result<Gguf, WeightsError> {
        let mut found = Gguf {
            shards: Vec::new(),
            names: BTreeMap::new(),
            metadata: Metadata::default(),
        };
        let files = files_of(path);
        let count = files.len();
        for (at, file) in files.into_iter().enumerate() {
            let header = found.add(&file)?;
            if let Err(reason) = header.check_shard(at, count) {
                return Err(WeightsError::Corrupt { file, reason });
            }
            // llama.cpp writes the metadata into the first file only.
            if at == 0 {
                found.metadata.values = header.values;
            }
        }
        Ok(found)
    }

    fn add(&mut self, file: &Path) -> Result<Header, WeightsError> {
        let handle = regular::open(file)?;
        let map = Map::new(&handle).map_err(WeightsError::io(file))?;
        let corrupt = |reason: Damage| WeightsError::Corrupt {
            file: file.to_path_buf(),
            reason,
        };
        let mut header = read_header(&map).map_err(corrupt)?;
        let infos = std::mem::take(&mut header.infos);
        for (index, info) in infos.iter().enumerate() {
            let shard = self.shards.len();
            let place = Place { shard, index };
            // Which of the two was meant is unknowable.
            if self.names.insert(info.name.clone(), place).is_some() {
                let twice = format!("tensor `{}` is there twice", info.name);
                return Err(corrupt(Damage::Header(twice)));
            }
            let dtype = match info.kind {
                Kind::Numbers(dtype) => Some(dtype),
                _ => None,
            };
            let about = TensorInfo {
                shape: info.shape.clone(),
                dtype,
            };
            self.metadata.tensors.insert(info.name.clone(), about);
        }
        self.shards.push(Shard {
            file: file.to_path_buf(),
            map: Arc::new(map),
            infos,
        });
        Ok(header)
    }

    /// Returns the names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.names.keys()
    }

    /// Returns the tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<Found<'_>> {
        let (name, place) = self.names.get_key_value(name)?;
        let shard = &self.shards[place.shard];
        Some(Found {
            name,
            file: &shard.file,
            map: &shard.map,
            info: &shard.infos[place.index],
        })
    }
}
