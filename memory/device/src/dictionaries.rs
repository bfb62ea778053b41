//! The dictionaries of a store, digested: what all threads read with, and which one they write
//! with.
//!
//! The memory is taken when the device is made. A dictionary that is installed later goes into it
//! on the thread that installs it; a thread that writes sees it by one load, and nothing is taken
//! away from one that still has the last.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use codec::{Codec, Dictionary, Settings};
use store::{DictionaryError, Store, DICTIONARIES, DICTIONARY_TAG, MAX_DICTIONARY};

/// Of one store; every thread that reads or writes has it.
#[derive(Debug)]
pub struct Dictionaries {
    /// By their places. One that is not there cannot be read: it is damaged, or was never
    /// installed.
    there: [OnceLock<Arc<Dictionary>>; DICTIONARIES],
    /// The place of the one to write with, and one more; 0 for none.
    newest: AtomicUsize,
    /// Memory for those that may come.
    rooms: Mutex<Vec<Arc<Dictionary>>>,
}

impl Dictionaries {
    /// Those of this store. Who asks first decides what they are for: with `settings` of zstd they
    /// are written with, and there is memory for `more` of them.
    pub(crate) fn of(store: &Store, settings: Option<Settings>, more: bool) -> Arc<Self> {
        let made = store.beside(|| Arc::new(Self::new(store, settings, more)));
        // Nobody else in this program puts anything there.
        made.unwrap_or_else(|| Arc::new(Self::new(store, settings, false)))
    }

    fn new(store: &Store, settings: Option<Settings>, more: bool) -> Self {
        let level = settings.filter(|of| of.codec() == Codec::Zstd).map(|of| of.level());
        let this = Self {
            there: [const { OnceLock::new() }; DICTIONARIES],
            newest: AtomicUsize::new(0),
            rooms: Mutex::new(Vec::with_capacity(DICTIONARIES)),
        };
        let mut bytes = Box::new([0; MAX_DICTIONARY]);
        let taken = store.dictionaries();
        for place in 0..taken {
            let mut dictionary = Dictionary::room(level);
            let Ok(found) = store.dictionary(place, &mut bytes) else { continue };
            if dictionary.digest(&bytes[..found.len]).is_ok() {
                let _ = this.there[place].set(Arc::new(dictionary));
                this.newest.store(place + 1, Ordering::Release);
            }
        }
        if more && level.is_some() {
            let rooms = (taken..DICTIONARIES).map(|_| Arc::new(Dictionary::room(level)));
            this.lock().extend(rooms);
        }
        this
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Dictionary>>> {
        // Whatever is in it is whole.
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The one of this place.
    #[inline]
    pub fn at(&self, place: usize) -> Option<&Arc<Dictionary>> {
        self.there.get(place)?.get()
    }

    /// What pages are written with, if with any: the tag's, and the dictionary.
    #[inline]
    pub fn newest(&self) -> Option<(u8, &Arc<Dictionary>)> {
        // Pairs with the Release in `install`.
        let place = self.newest.load(Ordering::Acquire).checked_sub(1)?;
        let tag = DICTIONARY_TAG + u8::try_from(place).expect("a few");
        Some((tag, self.at(place)?))
    }

    /// Dictionaries that may be installed yet.
    pub fn rooms(&self) -> usize {
        self.lock().len()
    }

    /// Whether pages are written with one, or may be later.
    pub(crate) fn may_be(&self) -> bool {
        self.newest().is_some() || self.rooms() > 0
    }

    /// Bytes of memory for digested ones, of those that may come too.
    pub fn memory(&self) -> usize {
        let there = self.there.iter().filter_map(OnceLock::get).map(|one| one.memory());
        there.sum::<usize>() + self.lock().iter().map(|one| one.memory()).sum::<usize>()
    }

    /// Memory to try a dictionary in: `None` if none is left. [`install`](Self::install) it, or
    /// [`give_back`](Self::give_back).
    pub fn take_room(&self) -> Option<Arc<Dictionary>> {
        self.lock().pop()
    }

    /// Takes back what came to nothing. Lost to all if somebody still has it.
    pub fn give_back(&self, mut room: Arc<Dictionary>) {
        if let Some(empty) = Arc::get_mut(&mut room) {
            empty.clear();
            self.lock().push(room);
        }
    }

    /// Installs a dictionary, which `digested` is of these `bytes`, for good: from now on pages are
    /// written with it.
    ///
    /// # Errors
    ///
    /// The store's: no place, no memory. `digested` is given back then.
    pub fn install(
        &self,
        store: &Store,
        digested: Arc<Dictionary>,
        bytes: &[u8],
        gain: u64,
    ) -> Result<usize, DictionaryError> {
        let place = match store.install_dictionary(bytes, gain) {
            Ok(place) => place,
            Err(error) => {
                self.give_back(digested);
                return Err(error);
            }
        };
        // Places are given once.
        let _ = self.there[place].set(digested);
        self.newest.store(place + 1, Ordering::Release);
        Ok(place)
    }
}
