//! The section on the origin of the page: the spec, the command and the program.

use super::super::model::Inspection;
use super::escape;
use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

/// Renders the spec, the command line and the version with the commit of its source.
pub fn section(inspection: &Inspection) -> String {
    let commit = commit().map_or(String::new(), |commit| {
        format!(", source at commit <code>{}</code>", escape(&commit))
    });
    format!(
        "<h2 id=\"origin\">Origin</h2><p>Made by moesaic {}{commit}.</p>\
         <div class=\"card origin\"><pre class=\"plain\">{}</pre><details><summary>the spec, \
         as TOML</summary><pre class=\"plain\">{}</pre></details></div>\n",
        env!("CARGO_PKG_VERSION"),
        escape(&command(env::args_os())),
        escape(inspection.plan.spec.to_toml().trim_end()),
    )
}

/// Returns a command line. Bytes of paths that are no UTF-8 are shown as replacement characters.
fn command(words: impl Iterator<Item = OsString>) -> String {
    let words = words.map(|word| quoted(&word.to_string_lossy()));
    words.collect::<Vec<String>>().join(" ")
}

/// Quotes a word of a command line for a shell, if that is needed. Of the program only the name
/// stays.
fn quoted(word: &str) -> String {
    let name = Path::new(word)
        .file_name()
        .filter(|_| word.ends_with("/moesaic"));
    let word = name.map_or(word.into(), |name| name.to_string_lossy());
    let safe = |c: char| c.is_ascii_alphanumeric() || "-_=+./:,@%".contains(c);
    if !word.is_empty() && word.chars().all(safe) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// Returns the commit that the program was built from: the one that the build named, or that of the
/// source tree, if it is still there.
fn commit() -> Option<String> {
    if let Some(commit) = option_env!("MOESAIC_COMMIT") {
        return Some(commit.to_string());
    }
    let tree = env!("CARGO_MANIFEST_DIR");
    let output = Command::new("git")
        .args(["-C", tree, "rev-parse", "--short=12", "HEAD"])
        .output()
        .ok()?;
    let commit = String::from_utf8(output.stdout).ok()?.trim().to_string();
    (output.status.success() && !commit.is_empty()).then_some(commit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt;

    #[test]
    fn commands_can_be_pasted() {
        assert_eq!(quoted("/usr/bin/moesaic"), "moesaic");
        assert_eq!(quoted("--tokens=1,64"), "--tokens=1,64");
        assert_eq!(quoted("it's a spec.toml"), "'it'\\''s a spec.toml'");
        assert_eq!(quoted(""), "''");
        let path = OsString::from_vec(b"caf\xe9.toml".to_vec());
        let words = ["moesaic".into(), path];
        assert_eq!(command(words.into_iter()), "moesaic 'caf\u{fffd}.toml'");
    }
}
