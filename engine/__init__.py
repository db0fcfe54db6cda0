"""The engine: token ids in, token ids out. It schedules, decodes and samples, and knows neither text nor HTTP."""
