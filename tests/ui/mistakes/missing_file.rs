//! The file is named, and where it was looked for.

moesaic::layer! {
    pub struct Nowhere = "specs/nowhere.toml";
}

fn main() {}
