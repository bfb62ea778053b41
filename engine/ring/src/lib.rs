//! Bounded lock-free rings and the event count that lets their two ends sleep.
