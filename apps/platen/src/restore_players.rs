//! The players of a restore: processes that serve an image, or a copy of it, to its VMs.

use crate::restore_interrupt;
use crate::restore_player::Serve;
use crate::restore_player_link::{lock, Player, PlayerOptions};
use crate::restore_source::{From, Source};
use crate::say::say;
use image::Image;
use player::Recovery;
use rustix::net::{shutdown, Shutdown};
use serde_json::Value;
use std::sync::mpsc::{channel, Receiver};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Longest wait for a player that writes the hot set of a finished restore, to a disk that may
/// hang.
const HOT_SET: Duration = Duration::from_secs(2);

/// The image, its copies, and the players that serve them. All VMs of a restore share them.
pub(crate) struct Players<'a> {
    sources: Vec<Source<'a>>,
    options: PlayerOptions<'a>,
    started: Mutex<Vec<Arc<Player>>>,
}

/// The service of one VM by a player.
pub(crate) struct Service {
    pub(crate) player: Arc<Player>,
    /// Events of the VM. It is disconnected once the player has ended.
    pub(crate) events: Receiver<Value>,
}

impl<'a> Players<'a> {
    pub(crate) fn new(sources: Vec<Source<'a>>, options: PlayerOptions<'a>) -> Self {
        Self { sources, options, started: Mutex::default() }
    }

    /// The image (0) or one of its copies; `None` if there are fewer copies.
    pub(crate) fn source(&self, nth: usize) -> Option<&Source<'a>> {
        self.sources.get(nth)
    }

    /// The image.
    pub(crate) fn image(&self) -> &Arc<Image> {
        &self.sources[0].image
    }

    /// Has a VM served from copy `nth`: by the player that serves it to other VMs, or by another
    /// one if that player has died. With `recovery` the player continues on that connection.
    pub(crate) fn serve(
        &self,
        nth: usize,
        serve: &Serve,
        recovery: Option<&Recovery>,
    ) -> anyhow::Result<Service> {
        // Once the player knows of the VM, it needs this process no more.
        restore_interrupt::plays();
        let mut started = lock(&self.started);
        for player in started.iter().filter(|player| player.source == nth) {
            if let Some(events) = player.serve(serve, recovery)? {
                return Ok(Service { player: Arc::clone(player), events });
            }
        }
        let player = Player::start(nth, &self.sources[nth], self.options)?;
        let player = Arc::new(player);
        say(&format!("player {} begins", player.pid));
        started.push(Arc::clone(&player));
        // Without a sender there are no events: this player has died already.
        let events = player.serve(serve, recovery)?.unwrap_or_else(|| channel().1);
        Ok(Service { player, events })
    }

    /// Lets the players end and write the hot set. Returns their figures.
    pub(crate) fn end(&self) -> Vec<Value> {
        let started = std::mem::take(&mut *lock(&self.started));
        for player in &started {
            // This fails if the player has died.
            let _ = shutdown(&*player.channel, Shutdown::Write);
        }
        let mut figures = Vec::new();
        for player in &started {
            // A player holds the image's lock while it writes the hot set.
            let is_late = !player.ends_within(HOT_SET);
            let mut of_it = player.heard.figures.get().cloned();
            if let Some(figures) = of_it.as_mut().and_then(Value::as_object_mut) {
                figures.remove("event");
            }
            figures.extend(of_it);
            if is_late {
                say(if player.heard.figures.get().is_some() {
                    "the player still writes the pages that the VM asked for beside the image"
                } else {
                    "the player continues without this process"
                });
            }
        }
        for source in &self.sources {
            if let From::There(remote) = &source.from {
                remote.end();
            }
        }
        figures
    }
}
