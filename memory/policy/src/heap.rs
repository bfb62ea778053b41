//! The heap memory of a policy, which a stand-by server has in advance.

use codec::Codec;

use crate::{sweep, training, writeback, Settings};

/// The most heap memory of a policy, in bytes, without writeback. `new` is the codec and level of
/// new pages if there is a trainer. Returns 0 for invalid settings and for a disabled policy.
pub fn memory(settings: &Settings, new: Option<codec::Settings>) -> usize {
    let (true, Ok(codec)) = (settings.enabled, settings.codec()) else { return 0 };
    let training = new.filter(|new| settings.trains() && new.codec() == Codec::Zstd);
    sweep::memory(codec, settings.group) + training.map_or(0, training::memory)
}

/// The most heap memory of writeback in bytes, which a policy takes beside [`memory`] if the store
/// has a backing device. Returns 0 for invalid settings and for a disabled policy.
pub fn writeback_memory(settings: &Settings) -> usize {
    let (true, Ok(codec)) = (settings.enabled, settings.codec()) else { return 0 };
    writeback::memory(codec, settings.writeback_batch_size)
}
