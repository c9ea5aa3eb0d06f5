"""`bigbatch report`: what runs came to, side by side."""
