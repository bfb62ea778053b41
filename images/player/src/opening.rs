//! The stream up to the point from which QEMU requests pages.

use image::Image;

use crate::wire::PAGE_SIZE;
use crate::{wire, PlayError};

/// Number of the PING in the package. Its PONG means that the devices are loaded.
pub(crate) const DEVICES_LOADED: u32 = 3;

/// Refuses an image that cannot be played, with the reason.
pub(crate) fn can_play(image: &Image) -> Result<(), PlayError> {
    let size = image.shape().page_size() as u64;
    if size != PAGE_SIZE {
        return Err(PlayError::Unfit(format!(
            "the guest has pages of {size} bytes, and only those of {PAGE_SIZE} can be sent on demand"
        )));
    }
    match image.index().blocks.iter().find(|block| block.host_page > PAGE_SIZE) {
        Some(block) => Err(PlayError::Unfit(format!(
            "RAM block '{}' was saved from huge pages of {} bytes, which cannot be sent on demand",
            block.name.escape_default(),
            block.host_page
        ))),
        None => Ok(()),
    }
}

/// Encodes steps 1 and 2 of the crate's list.
pub(crate) fn beginning(image: &Image) -> Vec<u8> {
    let state = image.state();
    let mut out = state.configuration.clone();
    wire::command(&mut out, wire::OPEN_RETURN_PATH, &[]);
    wire::ping(&mut out, 1);
    wire::advise(&mut out);
    wire::start_of_ram(&mut out, image, true);
    out.extend_from_slice(&state.early);
    for block in image.index().blocks.iter().filter(|block| block.pages > 0) {
        wire::discard(&mut out, &block.name, block.pages * PAGE_SIZE);
    }
    out
}

/// Appends step 4 of the crate's list. From its last byte on QEMU requests pages.
pub(crate) fn put_devices(out: &mut Vec<u8>, image: &Image) {
    let state = image.state();
    wire::ping(out, 2);
    let mut elements = Vec::new();
    wire::command(&mut elements, wire::LISTEN, &[]);
    elements.extend_from_slice(&state.devices);
    wire::ping(&mut elements, DEVICES_LOADED);
    wire::command(&mut elements, wire::RUN, &[]);
    wire::packaged(out, &elements);
    wire::ping(out, 4);
}
