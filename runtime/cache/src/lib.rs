//! The content-addressed kernel store and its packs.
