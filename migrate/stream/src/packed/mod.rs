//! The packed form of one chunk: structure, then literals, then page bodies (`PACKED.md`).

mod code;
mod error;
mod format;
mod header;
mod pack;
mod unpack;

pub use error::UnpackError;
pub use format::MAX_CHUNK;
pub use pack::{pack, worth_packing_without_codec};
pub use unpack::unpack;
