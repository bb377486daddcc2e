//! Damage of weight files.

use thiserror::Error;

/// The reason a file cannot be what its name says.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Damage {
    /// The file ends before what its header lists, as after a download that stopped.
    #[error("{0}; it may be cut short")]
    CutShort(String),

    /// The file became shorter while it was open.
    #[error("it was cut short since it was opened")]
    Shrunk,

    /// The header contradicts itself or the format.
    #[error("{0}")]
    Header(String),

    /// A GGUF file of a version that is not read.
    #[error("it is of version {0} of GGUF; versions 2 and 3 are read")]
    Version(u32),

    /// A GGUF file that a big-endian machine wrote.
    #[error("it is of a big-endian machine, which is not read")]
    BigEndian,

    /// A GGUF file of several, without the others beside it.
    #[error(
        "it is one of {count} shards; name it as llama.cpp does, NAME-00001-of-{count:05}.gguf, \
         beside the others"
    )]
    OneOfShards {
        /// The number of files by its header.
        count: usize,
    },

    /// A GGUF file whose name and header disagree on which of several files it is.
    #[error("by its name it is shard {by_name}, and by its key `split.no` shard {by_key}")]
    OtherShard {
        /// The shard by the name, from 1.
        by_name: usize,
        /// The shard by the header, from 1.
        by_key: usize,
    },

    /// The index of a checkpoint cannot be read.
    #[error("{0}")]
    Index(String),

    /// The index names a file that is not below its directory.
    #[error("it names the file `{file}` outside the directory")]
    Outside {
        /// The name in the index.
        file: String,
    },

    /// The index says that the file has a tensor, and it has not.
    #[error("the index says it has `{tensor}`, but it has not")]
    NotThere {
        /// The name in the index.
        tensor: String,
    },
}
