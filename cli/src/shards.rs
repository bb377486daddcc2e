//! Metadata of a rank's weight file: the rank, the number of ranks and the cut. It lets `unshard`
//! put files into the order of ranks, whatever the order in which a shell lists them.

use crate::console::Console;
use crate::failure::{Failure, Result};
use moesaic::Parallel;
use moesaic::weights::Checkpoint;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The key of the metadata.
pub const KEY: &str = "moesaic.shard";

/// The most ranks that a file's metadata may name: far more than any layer is cut for, so a larger
/// number is damage.
const MOST_RANKS: usize = 1 << 20;

/// The cut of a layer for ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Number of ranks.
    pub ranks: usize,
    /// Number of ranks that share each expert.
    pub expert_tp: usize,
    /// Whether the same ranks also share the shared experts.
    pub sharded: bool,
    /// The placement of experts on groups of ranks, as text.
    pub placement: String,
}

/// The files of the ranks, in the order of ranks.
pub struct Ordered {
    pub files: Vec<PathBuf>,
    /// The first of the given files, and the cut that all files name; `None` if they name none.
    pub said: Option<(PathBuf, Cut)>,
}

/// A file with the rank and cut in its metadata, if it has them.
type Noted<'f> = (&'f Path, Option<(usize, Cut)>);

/// Returns the name of a rank's file. Sorted names are in the order of ranks.
pub fn file_name(rank: usize, ranks: usize) -> String {
    let digits = ranks.saturating_sub(1).to_string().len();
    format!("rank-{rank:0digits$}.safetensors")
}

impl Cut {
    /// Returns the cut of a mesh, with the placement as text.
    pub fn new(mesh: Parallel, placement: String) -> Cut {
        Cut {
            ranks: mesh.ranks(),
            expert_tp: mesh.expert_tp,
            sharded: mesh.shards_shared(),
            placement,
        }
    }

    /// Returns the metadata for a rank's file.
    pub fn text(&self, rank: usize) -> String {
        json!({
            "rank": rank,
            "ranks": self.ranks,
            "expert_tp": self.expert_tp,
            "shared": self.shared(),
            "placement": self.placement,
        })
        .to_string()
    }

    fn shared(&self) -> &'static str {
        if self.sharded { "sharded" } else { "whole" }
    }

    /// Parses metadata into a rank and its cut.
    fn read(text: &str) -> Option<(usize, Cut)> {
        let read: Value = serde_json::from_str(text).ok()?;
        let number = |key: &str| usize::try_from(read.get(key)?.as_u64()?).ok();
        let word = |key: &str| read.get(key)?.as_str();
        let cut = Cut {
            ranks: number("ranks")?,
            expert_tp: number("expert_tp")?,
            sharded: word("shared")? == "sharded",
            placement: word("placement")?.to_string(),
        };
        Some((number("rank")?, cut))
            .filter(|(rank, cut)| *rank < cut.ranks && cut.ranks <= MOST_RANKS)
    }

    /// Refuses a file whose cut `said` differs from this one, which the command's options describe.
    pub fn check(&self, file: &Path, said: &Cut) -> Result {
        let parts = |cut: &Cut| {
            [
                format!("--expert-tp {}", cut.expert_tp),
                format!("--shared {}", cut.shared()),
                format!("a --placement that says `{}`", cut.placement),
            ]
        };
        let mut both = parts(said).into_iter().zip(parts(self));
        if let Some((theirs, ours)) = both.find(|(theirs, ours)| theirs != ours) {
            let message = format!("{} was cut with {theirs}, not {ours}", file.display());
            return Err(Failure::input(message).hint(format!("say {theirs}")));
        }
        Ok(())
    }
}

/// Puts the files into the order of ranks, and returns the cut that they name. Files without
/// metadata, which another program has written, are taken in the given order.
pub fn in_order(files: &[PathBuf], console: &Console) -> Result<Ordered> {
    let noted = files.iter().map(|file| noted(file));
    let noted: Vec<Noted<'_>> = noted.collect::<Result<_>>()?;
    let with = noted
        .iter()
        .find_map(|(file, said)| Some((*file, said.as_ref()?)));
    let Some((first, (_, cut))) = with else {
        console.note("the files do not say which rank's they are: they are taken in this order");
        return Ok(Ordered {
            files: files.to_vec(),
            said: None,
        });
    };
    let mut ranks: Vec<Option<&Path>> = vec![None; cut.ranks];
    for (file, said) in &noted {
        let rank = rank_of(file, said.as_ref(), (first, cut))?;
        if let Some(other) = ranks[rank].replace(file) {
            let (file, other) = (file.display(), other.display());
            let message = format!("{other} and {file} are both of rank {rank}");
            return Err(Failure::input(message).hint("give each rank's file once"));
        }
    }
    if let Some(missing) = ranks.iter().position(Option::is_none) {
        let message = format!(
            "the part of rank {missing} is missing: there are {} ranks, and {} files",
            cut.ranks,
            files.len()
        );
        return Err(Failure::input(message).hint("give the files of all ranks"));
    }
    let ranks = ranks.into_iter().flatten().map(Path::to_path_buf);
    Ok(Ordered {
        files: ranks.collect(),
        said: Some((first.to_path_buf(), cut.clone())),
    })
}

/// Returns the rank of a file. `first` is the first file with metadata and its cut, which must be
/// the same for all files.
fn rank_of(file: &Path, said: Option<&(usize, Cut)>, (first, cut): (&Path, &Cut)) -> Result<usize> {
    let (file, first) = (file.display(), first.display());
    let message = match said {
        Some((rank, own)) if own == cut => return Ok(*rank),
        Some((rank, own)) => format!(
            "{first} is of {} ranks, {file} is rank {rank} of {} in another cut",
            cut.ranks, own.ranks
        ),
        None => format!("{first} says which rank's it is, {file} does not"),
    };
    Err(Failure::input(message).hint("give the files of one `moesaic experts shard`"))
}

fn noted(file: &PathBuf) -> Result<Noted<'_>> {
    let checkpoint = Checkpoint::open(file)?;
    let Some(text) = checkpoint.noted(KEY) else {
        return Ok((file, None));
    };
    let said = Cut::read(text).ok_or_else(|| {
        let file = file.display();
        Failure::input(format!("{file}: its `{KEY}` names no rank: {text}"))
    })?;
    Ok((file, Some(said)))
}
